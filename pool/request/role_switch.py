"""The roles that a pool serves now, among those that it can serve.

New requests of a role that was switched off are rejected; requests that run go on to their end, and
their pages and the prefix cache stay. Belongs to the event loop's thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.errors import FieldViolation, InvalidRequestError, UnavailableError

logger = logging.getLogger(__name__)


@dataclass
class RoleSwitch:
    """The current roles of a pool.

    `able` are the roles that it can serve, `active` those that it serves. Each switch has a larger
    `epoch` than the one before, so that a late one has no effect.
    """

    able: tuple[str, ...]
    active: tuple[str, ...]
    on_switched: Callable[[], None] = lambda: None
    epoch: int = field(default=0, init=False)

    def reason_against(self, role: str) -> str:
        """Return why the pool serves no new request of a role; empty if it does.

        An empty role means any.
        """
        if not role or role in self.active:
            return ""
        return f"it was switched to {' and '.join(self.active)}"

    def check(self, role: str) -> None:
        """Check that the pool serves a role.

        Raises:
            UnavailableError: it does not.
        """
        if reason := self.reason_against(role):
            raise UnavailableError(f"the pool takes no {role} requests: {reason}")

    def set(self, epoch: int, roles: Sequence[str]) -> None:
        """Serve these roles from now on. A repeated switch has no effect.

        Raises:
            InvalidRequestError: the pool cannot serve them, or a later switch came first.
        """
        if not roles:
            raise InvalidRequestError(FieldViolation("roles", "must name at least one role"))
        if unable := [role for role in roles if role not in self.able]:
            raise InvalidRequestError(
                FieldViolation("roles", f"must be among {', '.join(self.able)}, got {unable[0]!r}")
            )
        wanted = tuple(role for role in self.able if role in roles)
        if epoch == self.epoch and wanted == self.active:
            return
        if epoch <= self.epoch:
            raise InvalidRequestError(
                FieldViolation("epoch", f"must be larger than {self.epoch}, got {epoch}")
            )
        self.epoch, self.active = epoch, wanted
        logger.info("switched roles", extra={"roles": ",".join(wanted), "epoch": epoch})
        self.on_switched()
