"""The tenant of a call: a client of a client, such as a user of a gateway, named in the call's
metadata."""

import re
from collections.abc import Mapping

from runtime.errors import FieldViolation, InvalidRequestError

TENANT_KEY = "baton-tenant"
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")


def tenant_of(metadata: Mapping[str, str | bytes]) -> str | None:
    """Return the tenant's name, or None without one.

    Raises:
        InvalidRequestError: the name cannot be used.
    """
    name = metadata.get(TENANT_KEY)
    if name is None:
        return None
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            FieldViolation(TENANT_KEY, "must be 1 to 64 of A-Z a-z 0-9 . _ - : @ /")
        )
    return name
