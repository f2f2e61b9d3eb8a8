"""Version of this source tree; pyproject.toml takes it from here."""

VERSION = "0.1.0"

# Version of the messages by which routers send requests to workers (protos/baton/v1/prefill.proto,
# decode.proto). It increases with every change that both sides must support. Before version 1 each
# request had its own call.
WIRE_VERSION = 1
