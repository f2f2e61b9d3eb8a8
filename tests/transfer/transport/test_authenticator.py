"""Authenticators that a stranger cannot make: they agree with NIST's, and no changed bit passes."""

import pytest

from transfer.transport.authenticator import KEY_BYTES, SEAL_BYTES, Authenticator, derived, new_key

MESSAGE, LABEL = bytes(range(48)), b"label of a part"


def test_it_is_gmac() -> None:
    """The first vector of 128 bits of additional data and no text in NIST's gcmEncryptExtIV256."""
    key = bytes.fromhex("78dc4e0aaf52d935c3c01eea57428f00ca1fd475f5da86a49c8dd73d68c8e223")
    number = int.from_bytes(bytes.fromhex("d79cf22d504cc793c3fb6c8a"), "little")
    data = bytes.fromhex("b96baa8c1c75a671bfb2d08d06be5f36")
    assert Authenticator(key).seal(number, data) == bytes.fromhex(
        "3e5d486aa2e30b22e040b85723a06e76"
    )


def test_no_flipped_bit_of_message_label_or_number_passes() -> None:
    authenticator = Authenticator(new_key())
    seal = authenticator.seal(5, MESSAGE, LABEL)
    assert len(seal) == SEAL_BYTES
    assert authenticator.accepts(seal, 5, MESSAGE, LABEL)
    for text in (MESSAGE, LABEL, seal):
        for bit in range(8 * len(text)):
            changed = bytearray(text)
            changed[bit // 8] ^= 1 << bit % 8
            parts = [bytes(changed) if part is text else part for part in (seal, MESSAGE, LABEL)]
            assert not authenticator.accepts(parts[0], 5, parts[1], parts[2])
    assert not any(authenticator.accepts(seal, 5 ^ 1 << bit, MESSAGE, LABEL) for bit in range(64))


def test_another_key_makes_another_authenticator() -> None:
    assert not Authenticator(new_key()).accepts(
        Authenticator(new_key()).seal(1, MESSAGE), 1, MESSAGE
    )


@pytest.mark.parametrize(
    "other",
    [
        ("lane", b"ab", b"c"),
        ("lane", b"a", b"b", b"c"),
        ("lane", b"abc"),
        ("frame", b"a", b"bc"),
        ("lane", b"a", b"bd"),
    ],
)
def test_each_purpose_and_context_has_a_key_of_its_own(other: tuple[str, bytes]) -> None:
    key = new_key()
    purpose, *context = other
    assert len(key) == KEY_BYTES
    assert derived(key, "lane", b"a", b"bc") == derived(key, "lane", b"a", b"bc")
    assert derived(key, "lane", b"a", b"bc") != derived(key, purpose, *context)
    assert derived(key, "lane", b"a", b"bc") != derived(new_key(), "lane", b"a", b"bc")
