"""tokenizer.json of a GGUF file: byte-level BPE with merges, or SentencePiece with scores."""

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from runtime.gguf.metadata import GgufMetadata, refused

_PREFIX = "tokenizer.ggml."
# Kinds of tokens (gguf.TokenType).
_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_SPACE = "\u2581"
# How texts are split before merges, by `tokenizer.ggml.pre`. The expressions are those that the
# published tokenizer.json of the models have.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%s}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _GPT4 % 3, _GPT4.replace("{1,%s}", "")
_SPLITS = {"llama-bpe": _LLAMA3, "llama-v3": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}
_DIGITS = ("smollm",)
_PLAIN = ("default", "gpt-2", "gpt2")


def tokenizer_of(metadata: GgufMetadata) -> Tokenizer:
    """Return the tokenizer.

    Raises:
        ConfigError: its kind is not supported, or a list is absent.
    """
    special: list[AddedToken] = []
    whole: list[AddedToken] = []
    kind = metadata.text(f"{_PREFIX}model")
    tokens = _list(metadata, "tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise refused(f"{_PREFIX}tokens has a token twice")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata, tokens, vocabulary)
    else:
        raise refused(f"tokenizer {kind!r} is not supported; supported are gpt2 and llama")
    kinds = metadata.optional(f"{_PREFIX}token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise refused(f"{_PREFIX}token_type must be a list with one kind for each token")
    for index, token in enumerate(tokens):
        if kinds[index] in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kinds[index] == _USER:
            whole.append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)
    if (first := _added_at_start(metadata, tokens, kind)) is not None:
        token, index = first
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, index)]
        )
    return tokenizer


def token_of(metadata: GgufMetadata, name: str) -> str | None:
    """Return the text of a token by its role: bos, eos, eot, padding."""
    index = id_of(metadata, name)
    return None if index is None else str(_list(metadata, "tokens")[index])


def id_of(metadata: GgufMetadata, name: str) -> int | None:
    """Return the id of a token by its role, or None. Raises ConfigError if there is no such token."""
    index = metadata.optional(f"{_PREFIX}{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(_list(metadata, "tokens")):
        raise refused(f"{_PREFIX}{name}_token_id must be the id of a token, got {index!r}")
    return index


def vocabulary_size(metadata: GgufMetadata) -> int:
    """Return the number of tokens. Raises ConfigError without a vocabulary."""
    return len(_list(metadata, "tokens"))


def _list(metadata: GgufMetadata, name: str) -> list[str]:
    values = metadata.optional(f"{_PREFIX}{name}")
    if not isinstance(values, list):
        raise refused(f"{_PREFIX}{name} must be a list")
    return values


def _added_at_start(
    metadata: GgufMetadata, tokens: Sequence[str], kind: str
) -> tuple[str, int] | None:
    """Return the token that begins every text, and its id."""
    is_added = metadata.optional(f"{_PREFIX}add_bos_token")
    if is_added is None:
        is_added = kind == "llama"
    index = id_of(metadata, "bos")
    return (tokens[index], index) if is_added and index is not None else None


def _byte_level(metadata: GgufMetadata, vocabulary: dict[str, int]) -> Tokenizer:
    merges = [merge.partition(" ")[::2] for merge in _list(metadata, "merges")]
    pre = metadata.text(f"{_PREFIX}pre", "default")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=_SPLITS.get(pre) == _LLAMA3))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in _PLAIN:
        tokenizer.pre_tokenizer = byte_level
    else:
        known = ", ".join(sorted({*_SPLITS, *_DIGITS, *_PLAIN}))
        raise refused(f"{_PREFIX}pre {pre!r} is not supported; supported are {known}")
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    metadata: GgufMetadata, tokens: Sequence[str], vocabulary: dict[str, int]
) -> Tokenizer:
    scores = metadata.optional(f"{_PREFIX}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise refused(f"{_PREFIX}scores must be a list with one score for each token")
    merges = _merges(tokens, scores, vocabulary)
    unknown = token_of(metadata, "unknown")
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", _SPACE)
    has_prefix = metadata.optional(f"{_PREFIX}add_space_prefix")
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix or has_prefix is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(
    tokens: Sequence[str], scores: Sequence[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's BPE does, most likely first.

    It joins the neighbors whose union has the highest score, so every split of a token into two
    tokens is a merge with the token's score.
    """
    order = sorted(range(len(tokens)), key=lambda index: (-scores[index], index))
    found = []
    for index in order:
        token = tokens[index]
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        found += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return found
