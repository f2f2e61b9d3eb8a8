"""The version of this tree; pyproject.toml reads it here."""

VERSION = "0.1.0"

# Of the messages by which routers give workers their requests (protos/baton/v1/prefill.proto,
# decode.proto): it rises with every change that the other side must know of. Before it was counted
# each request had calls of its own.
WIRE_VERSION = 1
