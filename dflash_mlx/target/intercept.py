"""Watch or replace the calls of single modules during one forward, on those instances only.

For the time of a `with` block the class of each named module is swapped for a subclass whose call asks a
handler; parameters, attributes and every other instance stay untouched, and nothing stays behind. Handlers
live in a context variable, so threads and interleaved generators that share a model do not see each
other's. Knows nothing of language models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from mlx import nn

# handler(call, *args, **kwargs): `call` is the module's own bound call
Handler = Callable[..., Any]

_NONE: Mapping[int, tuple[Handler, ...]] = MappingProxyType({})
_handlers: ContextVar[Mapping[int, tuple[Handler, ...]]] = ContextVar("dflash_handlers", default=_NONE)
_lock = threading.Lock()
_swapped: dict[int, tuple[type, int]] = {}  # id(module) -> its own class, users


@cache
def _subclass(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = partial(cls.__call__, self)
        for handler in _handlers.get().get(id(self), ()):
            own = partial(handler, own)
        return own(*args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


@contextmanager
def intercept(modules: Sequence[tuple[nn.Module, Handler]]) -> Iterator[None]:
    """Route calls of `modules` through their handlers while the block runs, in this thread's context.

    A module that is named twice passes through both, the later one outermost.
    """
    handlers = dict(_handlers.get())
    for module, handler in modules:
        handlers[id(module)] = (*handlers.get(id(module), ()), handler)
    token = _handlers.set(handlers)
    for module, _ in modules:
        with _lock:
            own, users = _swapped.get(id(module), (type(module), 0))
            _swapped[id(module)] = own, users + 1
            if users == 0:
                module.__class__ = _subclass(own)
    try:
        yield
    finally:
        for module, _ in modules:
            with _lock:
                own, users = _swapped.pop(id(module))
                if users > 1:
                    _swapped[id(module)] = own, users - 1
                else:
                    module.__class__ = own
        _handlers.reset(token)
