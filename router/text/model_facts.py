"""Facts of the served model that a router needs to check requests, without the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from protos import worker_pb2
from router.text.control_tokens import UserControlTokens
from router.text.tokenizer import TextTokenizer, load_text_tokenizer
from runtime.errors import FieldViolation, UnavailableError, UnknownModelError
from runtime.grammar import Grammars, load_grammars
from runtime.model_files.adapter_folders import is_adapter_name
from runtime.model_files.config import read_config, read_facts
from runtime.model_files.end_tokens import read_end_tokens
from runtime.model_files.model_folder import check_model_folder
from runtime.model_files.sampling import SamplingDefaults, read_sampling_defaults
from runtime.model_files.tokenizer_files import tokenizer_digest
from runtime.version import WIRE_VERSION

MAX_SHOWN_NAME = 64
MAX_LISTED_ADAPTERS = 8
REPORTS_S = 1.0  # seconds after which a worker may have reported its adapters


@dataclass(frozen=True)
class ServedAdapters:
    """The keys of the adapters that workers of both roles accept, by name.

    Attributes:
        offered: to new requests, in the order of the names.
        former: further ones, for responses that have begun.
        differing: names that both roles offer, but not in the same version.
        is_known: whether workers of both roles have reported.
    """

    offered: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    differing: frozenset[str] = frozenset()
    is_known: bool = True

    def versions(self, name: str, *, resumes: bool) -> tuple[str, ...]:
        """Return the keys that a request may have, the offered one first; none if there are none.

        Raises:
            UnavailableError: there may be one soon.
        """
        offered = (self.offered[name],) if name in self.offered else ()
        former = self.former.get(name, ()) if resumes else ()
        versions = (*offered, *former)
        if not versions and name in self.differing:
            raise UnavailableError(
                f"model: workers of both roles have the adapter {name!r}, but not the same version",
                retry_after_s=REPORTS_S,
            )
        if not versions and not self.is_known and is_adapter_name(name):
            raise UnavailableError(
                f"model: no workers of both roles have reported yet whether they have {name!r}",
                retry_after_s=REPORTS_S,
            )
        return versions


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the served model.

    `max_context_tokens` counts prompt plus completion. `sampling` holds default parameters by name.
    """

    name: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str = ""  # of `runtime.model_files.tokenizer_files`
    sampling: Mapping[str, float] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()  # other names that requests may have
    adapters: ServedAdapters = ServedAdapters()

    def adapters_of(self, name: str, *, resumes: bool = False) -> tuple[str, ...]:
        """Return the keys of the adapter that a request with this model name may want.

        The offered version is first. Others follow if the request resumes a response. The key of
        the model itself is "". The names are "" and those of the model, each of them with ":" and
        the name of an adapter, and the name of an adapter alone.

        Raises:
            UnknownModelError: the name is not served.
            UnavailableError: it may be soon.
        """
        names = ("", self.name, *self.aliases)
        if name in names:
            return ("",)
        base, _, adapter = name.rpartition(":")
        if base in names and (versions := self.adapters.versions(adapter, resumes=resumes)):
            return versions
        first = ", ".join(islice(self.adapters.offered, MAX_LISTED_ADAPTERS))
        more = len(self.adapters.offered) - MAX_LISTED_ADAPTERS
        also = f", also with the adapters {first}{f' and {more} more' if more > 0 else ''},"
        shown = repr(name) if len(name) <= MAX_SHOWN_NAME else f"{name[:MAX_SHOWN_NAME]!r}..."
        raise UnknownModelError(
            FieldViolation(
                "model", f"{shown} is not served, {self.name!r}{also if first else ''} is"
            )
        )

    def mismatch(self, info: worker_pb2.WorkerInfo, role: str) -> str:
        """Return why a worker must not serve this model in this role; empty if it may."""
        roles = info.roles or [info.role]
        if role not in roles:
            return f"it is a {' and '.join(roles)} worker, configured as {role}"
        if info.wire_version != WIRE_VERSION:
            return (
                f"it speaks another version of the worker protocol: its wire version is "
                f"{info.wire_version}, the router's {WIRE_VERSION}"
            )
        expected = {
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "num_layers": self.num_layers,
        }
        for name, value in expected.items():
            if getattr(info, name) != value:
                return f"it serves another model: {name} is {getattr(info, name)}, the router's is {value}"
        digests = info.tokenizer_digest, self.tokenizer_digest
        # A worker without a tokenizer cannot misinterpret a prompt.
        if all(digests) and digests[0] != digests[1]:
            return (
                f"it has another tokenizer: the digest of its tokenizer.json is {digests[0]}, the router's "
                f"{digests[1]}"
            )
        ends = sorted(info.eos_token_ids), sorted(self.eos_token_ids)
        # Without a tokenizer a worker does not know its end token, and has no grammar that needs
        # it.
        knows_fewer = not digests[0] and digests[1] and set(ends[0]) <= set(ends[1])
        # Releases before this field send none.
        if ends[0] and ends[0] != ends[1] and not knows_fewer:
            return f"it ends responses elsewhere: its eos_token_id are {ends[0]}, the router's {ends[1]}"
        return ""


@dataclass(frozen=True)
class ServedModel:
    """The served model's limits, and its tokenizer if the model directory has one.

    `grammars` is None if structured output is not available. `notices` are messages for the
    operator.
    """

    facts: ModelLimits
    text_tokenizer: TextTokenizer | None
    grammars: Grammars | None = None
    notices: tuple[str, ...] = ()


def load_served_model(
    model_dir: Path,
    name: str = "",
    *,
    aliases: tuple[str, ...] = (),
    own_sampling: bool = True,
    user_control_tokens: UserControlTokens = UserControlTokens.TOKENS,
) -> ServedModel:
    """Load `config.json`, `generation_config.json` and the tokenizer files.

    The name defaults to the directory's. Without `own_sampling` the model's sampling defaults are
    ignored.

    Raises:
        ConfigError: `config.json` is missing or lacks a needed number, or another file cannot be
            used.
    """
    check_model_folder(model_dir, needs_weights=False)
    config = read_config(model_dir)
    stated = read_facts(config)
    ends = read_end_tokens(model_dir, config, stated.vocab_size)
    sampling = read_sampling_defaults(model_dir) if own_sampling else SamplingDefaults()
    facts = ModelLimits(
        name=name or model_dir.resolve().name,
        architecture=stated.architecture,
        vocab_size=stated.vocab_size,
        max_context_tokens=stated.max_context_tokens,
        num_layers=stated.num_layers,
        eos_token_ids=ends.ids,
        tokenizer_digest=tokenizer_digest(model_dir),
        sampling=sampling.stated,
        aliases=aliases,
    )
    return ServedModel(
        facts,
        load_text_tokenizer(model_dir, user_control_tokens),
        load_grammars(model_dir, facts.eos_token_ids, computes_masks=False),
        tuple(notice for notice in (ends.notice, sampling.notice) if notice),
    )
