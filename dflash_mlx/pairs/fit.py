"""Whether a draft and a target belong together, from their facts alone, before anything heavy is loaded."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx import nn
from mlx_lm.utils import MODEL_REMAPPING, _get_classes

from ..checkpoint.facts import MAX_LAYERS
from ..checkpoint.fields import MAX_SIZE, brief
from ..checkpoint.special_tokens import special_tokens
from ..draft import DraftConfig
from ..errors import DraftError, TargetError
from ..target import Target
from .families import families


@dataclass(frozen=True)
class TargetFacts:
    """What a draft has to agree with: widths in elements, vocabulary in rows of the embedding."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> TargetFacts:
        """From a target's `config.json`; a wrapper's text model is under `text_config`.

        Raises `TargetError` when a size is missing or is no size.
        """
        text = {**config, **text_config(name, config)}
        sizes = []
        for size, most in (("hidden_size", MAX_SIZE), ("vocab_size", MAX_SIZE), ("num_hidden_layers", MAX_LAYERS)):
            if size not in text:
                raise TargetError(f"{name}: its config.json has no {size}, so no draft can be matched")
            if type(text[size]) is not int or not 0 < text[size] <= most:
                raise TargetError(f"{name}: config.json: {size}: {brief(text[size])} is not a number from 1 to {most}")
            sizes.append(text[size])
        return cls(name, *sizes)

    @classmethod
    def from_model(cls, target: Target) -> TargetFacts:
        return cls(target.name, target.hidden_size, target.vocab_size, len(target.layers))


def text_config(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a wrapper's `config.json`, {} where there is none."""
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise TargetError(f"{name}: config.json: text_config: {brief(text)} is not an object")
    return text


def refuse_draft_as_target(name: str, config: Mapping[str, Any]) -> None:
    """mlx-lm would load a draft as the `model_type` it names, and run nonsense."""
    if config.get("dflash_config") or "DFlash" in str(config.get("architectures")):
        raise TargetError(f"{name} is a DFlash draft, not a target; give it as --draft-model")


def check_fit(draft: DraftConfig, target: TargetFacts, draft_name: str) -> None:
    """Raise `DraftError` with both numbers unless the draft was made for a target of these sizes."""
    for what, ours, theirs in (
        ("target_hidden_size" if draft.target_hidden_size else "hidden_size", draft.tap_size, target.hidden_size),
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("num_target_layers", draft.num_target_layers or target.num_layers, target.num_layers),
    ):
        if ours != theirs:
            raise DraftError(f"draft {draft_name} does not fit {target.name}: {what} {ours} against {theirs}")
    if (deepest := max(draft.target_layer_ids)) >= target.num_layers:
        raise DraftError(
            f"draft {draft_name} does not fit {target.name}: it taps layer {deepest} of {target.num_layers} layers"
        )


def check_family(name: str, config: Mapping[str, Any], taps: bool = True) -> None:
    """Raise `TargetError` by family name unless mlx-lm has this model and its caches can be rewound.

    Args:
        taps: whether the drafter wants any; a family without can still be driven by prompt lookup.

    Builds the model without weights, which costs no memory: MLX arrays stay unevaluated.
    """
    family = config.get("model_type", "an unnamed model type")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            model_class, args_class = _get_classes(dict(config))
    except SystemExit:  # olmo's module asks for a package and leaves
        raise TargetError(f"{name}: mlx-lm can't import {brief(family)}: {said.getvalue()}") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # the last two: a type that is no name
        raise TargetError(f"{name}: mlx-lm has no model type {brief(family)}") from None
    known = families().get(model_class.__module__.rpartition(".")[2])
    if known is not None and known.status in ("refused", *(["lookup only"] if taps else [])):
        remedy = "run it without one (--draft-model none)" if known.status == "refused" else "try --draft-model lookup"
        raise TargetError(f"{name}: no draft can drive a {known.name} model: {known.reason}; {remedy}")
    try:
        skeleton: nn.Module = model_class(args_class.from_dict(dict(config)))
    except Exception as error:  # mlx-lm takes any config and raises what it likes
        what = f"{type(error).__name__}: {error}"
        raise TargetError(f"{name}: mlx-lm can't build a {family} from its config.json ({what})") from None
    target = Target(skeleton)
    target.require_rewindable(target.make_cache())


def family_problem(model_type: str) -> str | None:
    """Why no draft can drive a target of this type with the installed mlx-lm; None where one can, or nobody tried.

    By names alone: of a target that is at hand `check_family` knows more.
    """
    module = MODEL_REMAPPING.get(model_type, model_type)
    try:
        found = importlib.util.find_spec(f"mlx_lm.models.{module}")
    except (ImportError, ValueError):  # of a name with dots
        found = None
    if found is None:
        return f"the installed mlx-lm has no model type {brief(model_type)}"
    known = families().get(module)
    return None if known is None or known.status == "verified" else f"{module} targets: {known.reason}"


def check_special_tokens(draft: Path, target: Path, draft_name: str, mask_token_id: int) -> None:
    """Raise `DraftError` when the draft ships a tokenizer whose special tokens have other ids than the target's.

    The mask token may have another name at the same id: drafts rename an id that the target never emits.
    """
    ours, theirs = special_tokens(draft), special_tokens(target)
    named = {number: token for token, number in theirs.items()}
    for token, number in ours.items():
        if theirs.get(token, number) != number:
            problem = f"{brief(token)} is {number} there, {theirs[token]} here"
        elif number != mask_token_id and named.get(number, token) != token:
            problem = f"{number} is {brief(token)} there, {brief(named[number])} here"
        else:
            continue
        raise DraftError(f"draft {draft_name} was made for another tokenizer: {problem}")
