"""Watch or replace the calls of single modules during one forward, on those instances only.

For the time of a `with` block the class of each named module is swapped for a subclass whose call asks a
handler; parameters, attributes and every other instance stay untouched, and nothing stays behind. Handlers
are reached through a context variable, so threads and interleaved generators that share a model do not see
each other's; both that and the swap hold the scope of the block weakly, so that even an interrupt in the
middle of entering or leaving can't leave a handler that acts. Knows nothing of language models.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from mlx import nn

# handler(call, *args, **kwargs): `call` is the module's own bound call
Handler = Callable[..., Any]


class _Scope:
    """One `with` block: its handlers by module, and the scope around it."""

    def __init__(self, modules: Sequence[tuple[nn.Module, Handler]]):
        self.outer = _current()
        self.handlers: dict[int, tuple[Handler, ...]] = {}
        for module, handler in modules:
            self.handlers[id(module)] = (*self.handlers.get(id(module), ()), handler)

    def route(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        if self.outer is not None:
            call = self.outer.route(module, call)
        for handler in self.handlers.get(id(module), ()):
            call = partial(handler, call)
        return call


_scope: ContextVar[weakref.ref[_Scope] | None] = ContextVar("dflash_scope", default=None)
_lock = threading.Lock()
_swapped: dict[int, tuple[type, weakref.WeakSet[_Scope]]] = {}  # id(module) -> its own class, users


def _current() -> _Scope | None:
    reference = _scope.get()
    return None if reference is None else reference()


@cache
def _subclass(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = partial(cls.__call__, self)
        scope = _current()
        return own(*args, **kwargs) if scope is None else scope.route(self, own)(*args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


class intercept:
    """Route calls of `modules` through their handlers while the block runs, in this thread's context.

    A module that is named twice passes through both, the later one outermost. (No `contextmanager`: an interrupt
    between its own lines would leave the block entered.)
    """

    def __init__(self, modules: Sequence[tuple[nn.Module, Handler]]):
        self.modules, self.scope, self.outer = modules, _Scope(modules), _scope.get()

    def __enter__(self) -> None:
        try:
            for module, _ in self.modules:
                _enter(module, self.scope)
            _scope.set(weakref.ref(self.scope))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self.scope.handlers = {}
        _scope.set(self.outer)
        for module, _ in self.modules:
            _leave(module, self.scope)


def stop_intercepting() -> None:
    """After an interrupt, which may have struck while a block was left: no handler acts any more in this context."""
    scope = _current()
    while scope is not None:
        scope.handlers = {}
        scope = scope.outer
    _scope.set(None)


def _enter(module: nn.Module, scope: _Scope) -> None:
    with _lock:
        own, users = _swapped.setdefault(id(module), (type(module), weakref.WeakSet()))
        users.add(scope)
        module.__class__ = _subclass(own)


def _leave(module: nn.Module, scope: _Scope) -> None:
    with _lock:
        if id(module) not in _swapped:
            return  # an interrupt came before it was entered, or it is named twice
        own, users = _swapped[id(module)]
        users.discard(scope)
        if not users:
            module.__class__ = own
            del _swapped[id(module)]
