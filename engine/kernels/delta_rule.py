"""Constants of the chunked delta rule, shared by the torch and the Triton form."""

CHUNK = 64  # tokens whose triangular system is solved at once
