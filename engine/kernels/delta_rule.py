"""What both forms of the chunked delta rule, torch's and Triton's, have in common."""

CHUNK = 64  # tokens whose triangular system is solved at once
