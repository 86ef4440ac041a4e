"""The facts of a draft, one function each, from z-lab's layout in any of its spellings.

Other layouts are brought into this one first (`layouts.py`). Required facts are required: a missing or contradictory
one is a `DraftError` that names the field and the file, never a guess.
"""

from __future__ import annotations

from typing import Any

from ..draft.config import DFLASH2_FIELDS, FULL, GATE_ACTIVATIONS, PER_ELEMENT, PER_HEAD, SLIDING
from ..errors import DraftError
from .fields import MAX_SIZE, Fields, brief

DTYPES = ("float32", "float16", "bfloat16")

# Spellings of `target_layer_ids` whose numbers are one higher: they index transformers' `hidden_states`, in which the
# embedding comes first, as vLLM and `speculators` do.
SHIFTED_TAPS = ("layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")

# Backbones (`model_type`) that always have q_norm and k_norm; in others the tensors tell.
NORMED = ("qwen3", "laguna", "muse_glimmer_assistant")
# Backbones whose own code stores norm weights minus one; a draft that only borrowed the config may not.
OFFSET = ("qwen3_5", "qwen3_next")

# Heads of transformers' config classes, by `model_type`, where a config states no `head_dim`; of others hidden / heads.
HEAD_DIMS = {
    "qwen3": 128, "qwen3_next": 256, "qwen3_5": 256, "qwen3_5_text": 256, "gpt_oss": 64, "glm4": 128,
    "gemma": 256, "gemma2": 256, "gemma3_text": 256, "laguna": 128, "muse_glimmer_assistant": 128,
}  # fmt: skip
FIRST_SLIDING = 28  # what transformers' Qwen3Config takes for `max_window_layers` where a config states none
# And for `sliding_window`, where the key is absent (not null) and `use_sliding_window` true; a config that names no
# backbone is read as Qwen3's.
WINDOWS = dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), 4096)

# Projectors (`dflash_config.projector_type`): None for a DFlash draft's, for others what to tell the user.
PROJECTORS = {
    "dflash": None,
    "dflash2": None,
    "linear": None,
    "dspark": "a DSpark draft (it has a Markov head), which is not supported",
    "domino": "a Domino draft (it has a GRU projector), which is not supported",
    "lilicorr": "a LiLiCorr draft (it reranks candidates with a head of its own), which is not supported",
}
# Fields that may say that attention is of another kind, and what they may hold.
ATTENTION_KINDS = {"draft_attention_type": ("gqa", "mha"), "attention_mode": ("gqa", "mha")}

MAX_KERNEL = 256  # of a convolution, in block rows
MAX_CANDIDATES = 256  # a slot; the walk scores every pair of two slots'


def refuse_foreign(read: Fields) -> None:
    """Raise `DraftError` for what is no DFlash draft, by name."""
    config, nested = read.config, read.optional("dflash_config", dict) or {}
    names = read.optional("architectures", list) or []
    named = any("DFlash" in str(name) for name in names)
    if "eagle_config" in config and not named and not nested:
        raise DraftError(f"{read.source}: an EAGLE draft, not a DFlash draft (it has `eagle_config`)")
    if not named and not nested and "target_layer_ids" not in config:
        what = brief(names[0] if names else config.get("model_type", "an unnamed model")).strip("'")
        raise DraftError(
            f"{read.source}: {what} is not a DFlash draft (no dflash_config, no DFlash architecture); "
            "a target goes to --model"
        )
    if any("LiLiCorr" in str(name) for name in names):
        raise read.error("architectures", str(PROJECTORS["lilicorr"]))
    projector = read.get("projector_type", default="dflash")
    if problem := PROJECTORS.get(projector, "?") if isinstance(projector, str) else "?":
        raise read.error("projector_type", problem if problem != "?" else f"{brief(projector)} is not supported")
    if (rank := read.get("markov_rank", default=None)) not in (None, 0) or read.flag("enable_confidence_head"):
        what = "enable_confidence_head" if rank in (None, 0) else "markov_rank"
        raise read.error(what, f"{brief(rank or True)}: a DSpark draft, which is not supported")
    for name, known in ATTENTION_KINDS.items():
        if (kind := read.get(name, default=None)) not in (None, *known):
            raise read.error(name, f"{brief(kind)} is not supported, only {' and '.join(known)} attention is")
    if read.flag("shift_label"):
        raise read.error("shift_label", "true is not supported; it belongs to the Domino projector")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise read.error("hidden_act", f"{brief(activation)} is not supported, DFlash drafts use 'silu'")
    if (own := config.get("v_head_dim")) not in (None, config.get("head_dim", own)):
        raise read.error("v_head_dim", f"{brief(own)} differs from head_dim {brief(config['head_dim'])}: not supported")


def head_dim(read: Fields, hidden: int, heads: int) -> int:
    size = read.optional_int("head_dim") or HEAD_DIMS.get(str(read.config.get("model_type")))
    if size is None and hidden % heads:
        raise read.error("head_dim", f"missing, and hidden_size {hidden} is no multiple of {heads} heads")
    size = size or hidden // heads
    if size % 2 or size * heads > MAX_SIZE:
        raise read.error("head_dim", f"{size} is odd or, with {heads} heads, too large; rotary embedding needs pairs")
    return size


def block_size(read: Fields, sample_from_anchor: bool) -> int:
    block = read.positive("block_size")
    if block < 2 - sample_from_anchor:
        raise read.error("block_size", f"{block}: a block holds the anchor and at least one draft token")
    return block


def mask_token(read: Fields, vocab: int) -> int:
    mask = read.get("mask_token_id")
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab:
        raise read.error("mask_token_id", f"{brief(mask)} is not a token id below vocab_size {vocab}")
    return mask


def taps(read: Fields, target_layers: int | None) -> tuple[int, ...]:
    """Layers whose outputs feed the draft; every spelling that is there must say the same."""
    found: dict[str, list[int]] = {}
    for name in ("target_layer_ids", *SHIFTED_TAPS):
        if (ids := read.get(name, default=None)) is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(tap) is int for tap in ids):
            raise read.error(name, f"{brief(ids)} is not a list of layer numbers")
        shift = name in SHIFTED_TAPS
        if len(set(ids)) != len(ids):
            raise read.error(name, f"{brief(ids)} names a layer twice")
        if min(ids) < shift or (target_layers is not None and max(ids) >= target_layers + shift):
            limit = (
                "" if target_layers is None else f" to {target_layers - 1 + shift} (num_target_layers {target_layers})"
            )
            raise read.error(name, f"{brief(ids)} must lie in {int(shift)}{limit}")
        found[name] = [tap - shift for tap in ids]
    if not found:
        raise read.error("target_layer_ids", "missing; the draft can't be run without it")
    (name, ids), *others = found.items()
    for other, theirs in others:
        if theirs != ids:
            what = f"names the outputs of layers {brief(theirs)}, {name} those of {brief(ids)}"
            raise read.error(other, f"{what}; keep the ones the draft was trained with")
    return tuple(ids)


def taps_before_norm(read: Fields, ids: tuple[int, ...], target_layers: int | None) -> bool:
    """Whether a tap of the last layer, if there may be one, is taken before the target's final norm.

    Spellings that number taps as vLLM does mean its hidden states, which are not normed.
    """
    if target_layers is not None and max(ids) < target_layers - 1:
        return False
    stated = read.own("taps_before_norm")
    if stated is not None and not isinstance(stated, bool):
        raise read.error("taps_before_norm", f"{brief(stated)} is not true or false")
    shifted = read.get("target_layer_ids", default=None) is None
    return shifted if stated is None else stated


def attention(read: Fields, layers: int) -> tuple[tuple[str, ...], int | None, bool | None]:
    """Layer types, window and the causal override, by the precedence that vLLM and the reference share.

    `use_sliding_window` is transformers': where it is false no layer has a window, whatever its type; where it is true
    and no types are stated, layers from `max_window_layers` on slide, by its own window where none is stated.
    """
    use_swa = read.flag("use_swa")
    types = read.get("layer_types", default=None)
    windowed = read.get("use_sliding_window", default=None)
    if windowed not in (None, True, False):
        raise read.error("use_sliding_window", f"{brief(windowed)} is not true or false")
    backbone = str(read.config.get("model_type") or "qwen3")
    usual = WINDOWS.get(backbone) if windowed and "sliding_window" not in read.config else None
    causal = read.get("is_causal", default=None)
    if causal is None:
        causal = read.own("causal")
    if types is None and windowed and not use_swa and read.get("sliding_window", default=usual) is not None:
        first = read.get("max_window_layers", default=FIRST_SLIDING)
        if type(first) is not int or first < 0:
            raise read.error("max_window_layers", f"{brief(first)} is not a number of layers")
        types = [FULL if i < first else SLIDING for i in range(layers)]
    if types is None or (use_swa and isinstance(types, list) and SLIDING not in types):
        if types is not None and len(types) != layers:
            raise _wrong_length(read, types, layers)
        types = [SLIDING if use_swa else FULL] * layers
        if use_swa and causal is None:
            causal = False
    if not isinstance(types, list) or len(types) != layers:
        raise _wrong_length(read, types, layers)
    if unknown := sorted({str(kind) for kind in types} - {FULL, SLIDING}):
        raise read.error("layer_types", f"{brief(unknown)} is not {FULL!r} or {SLIDING!r}")
    window = None
    if SLIDING in types and (use_swa or windowed is not False):
        window = read.optional_int("swa_window_size") or read.optional_int("sliding_window") or usual
        if window is None:
            raise read.error("sliding_window", "missing, but layer_types has sliding layers")
        if window < 2:
            raise read.error("sliding_window", f"{window} leaves no room for context")
    if causal is not None and not isinstance(causal, bool):
        raise read.error("is_causal", f"{brief(causal)} is not true or false")
    return tuple(types), window, causal


def _wrong_length(read: Fields, types: Any, layers: int) -> DraftError:
    return read.error("layer_types", f"expected a list of num_hidden_layers {layers} entries, found {brief(types)}")


def qk_norm(read: Fields) -> bool:
    """Whether queries and keys are normed for certain; otherwise the tensors tell."""
    stated = read.own("qk_norm")
    if stated is not None and not isinstance(stated, bool):
        raise read.error("qk_norm", f"{brief(stated)} is not true or false")
    return str(read.config.get("model_type", "qwen3")).startswith(NORMED) if stated is None else stated


def offset_norms(read: Fields) -> bool | None:
    """Whether norm weights are stored minus one; None where only the tensors can tell."""
    stated = read.get("use_gemma_norm", default=None)
    if stated is None and str(read.config.get("model_type", "")).startswith(OFFSET):
        return None
    return read.flag("use_gemma_norm")


def draft_vocab(read: Fields, vocab: int) -> int | None:
    """Rows of the draft's own head where it has fewer than the target's."""
    size = read.optional_int("draft_vocab_size")
    if size is not None and size > vocab:
        raise read.error("draft_vocab_size", f"{size} is more than vocab_size {vocab}")
    return None if size == vocab else size


def sinks(read: Fields, layers: int) -> tuple[int, ...]:
    """Layers with an attention sink."""
    which = read.own("attention_sink_layers")
    if which is None:
        return tuple(range(layers)) if read.flag("attention_sink_bias") else ()
    if not isinstance(which, list) or not all(type(i) is int and 0 <= i < layers for i in which):
        raise read.error("attention_sink_layers", f"{brief(which)} is not a list of layers of the draft")
    return tuple(sorted(set(which)))


def gate(read: Fields) -> tuple[str | None, str]:
    """Width and activation of the gate on attention's output."""
    gating, activation = read.own("gating"), read.own("gate_activation") or "softplus"
    if gating not in (None, PER_HEAD, PER_ELEMENT):
        raise read.error("gating", f"{brief(gating)} is not {PER_HEAD!r} or {PER_ELEMENT!r}")
    if activation not in GATE_ACTIVATIONS:
        raise read.error("gate_activation", f"{brief(activation)} is not one of {', '.join(GATE_ACTIVATIONS)}")
    return gating, activation


def dtype(read: Fields) -> str | None:
    """What the weights are in, or were before they were quantised."""
    name = next((name for name in ("dtype", "torch_dtype") if read.config.get(name)), "dtype")
    stated = (read.optional(name, str) or "").removeprefix("torch.")
    if stated and stated not in DTYPES:
        raise read.error(name, f"{brief(stated)} is not one of {', '.join(DTYPES)}")
    return stated or None


def dflash2(read: Fields, hidden: int, vocab: int) -> dict[str, int]:
    """The fields of a DFlash 2 draft, none for a v1 draft."""
    named = any("DFlash2" in str(name) for name in read.optional("architectures", list) or [])
    if not named and all(read.get(name, default=None) in (None, 0) for name in DFLASH2_FIELDS):
        return {}
    limits = dict(zip(DFLASH2_FIELDS, (MAX_KERNEL, hidden, MAX_SIZE, min(vocab, MAX_CANDIDATES)), strict=True))
    sizes = {name: read.positive(name, most) for name, most in limits.items()}
    if hidden % (group := sizes["conv_group_size"]):
        raise read.error("conv_group_size", f"{group} does not divide hidden_size {hidden}")
    if (rows := 2 * sizes["conv_kernel_size"] * (hidden // group)) > MAX_SIZE:
        raise read.error("conv_kernel_size", f"with groups of {group} it asks for {rows} rows, {MAX_SIZE} are the most")
    return sizes
