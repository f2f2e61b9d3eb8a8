"""Slots of recurrent (conv and state) memory: one per request of a model that has any."""

from engine.memory.layout import NULL_INDEX
from engine.memory.leases import Lease, Ledger


class SlotLease(Lease):
    """One request's slot; the null slot, which nobody owns, for models without recurrent state."""

    @property
    def slot_id(self) -> int:
        """Raises InternalError after the end."""
        ids = self.ids()
        return ids[0] if ids else NULL_INDEX


class SlotAllocator:
    """Grants slots 1..num_slots-1; slot 0 is the null slot.

    With `num_slots` 0 the model has no recurrent state: every request gets a lease on the null slot, and there is
    no limit, so that callers need not know which kind of model they serve.
    """

    def __init__(self, num_slots: int, *, name: str = "slots") -> None:
        self.ledger = Ledger(name, num_slots)

    @property
    def is_stateless(self) -> bool:
        return self.ledger.num_ids == 0

    @property
    def num_total(self) -> int:
        return self.ledger.num_total

    @property
    def num_free(self) -> int:
        return self.ledger.num_free

    def alloc(self, *, owner: str) -> SlotLease:
        """Raises CapacityError when every slot is taken."""
        return SlotLease(self.ledger, owner, 0 if self.is_stateless else 1)
