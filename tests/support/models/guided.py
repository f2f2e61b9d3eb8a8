"""A tokenizer of 256 tokens for the tiny checkpoints: a printable character's id is its code
point."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 256
EOS = 2  # as the tiny checkpoints have it


def write_character_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` of a byte-level BPE without merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def spelled(text: str) -> tuple[int, ...]:
    return tuple(ord(character) for character in text)
