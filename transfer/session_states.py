"""The states of a transfer session on either side, and the transitions between them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class SessionInput(StrEnum):
    """Inputs of a session's state machine."""

    ALL_OPEN = "all_open"
    ALL_COMPLETE = "all_complete"
    FINISH = "finish"  # commit or release
    NEXT_EPOCH = "next_epoch"
    FAIL = "fail"
    ABORT = "abort"


class ReceiveState(StrEnum):
    """States of the decode side of a session."""

    RESERVED = "reserved"  # pages and slot are reserved; stages are posting receives
    RECEIVING = "receiving"  # every stage has posted: the destination terms may be sent
    COMPLETE = "complete"  # everything was received and verified
    COMMITTED = "committed"  # the request owns the memory now
    FAILED = "failed"
    ABORTED = "aborted"


class SendState(StrEnum):
    """States of the prefill side of a session."""

    PLANNED = "planned"
    SENDING = "sending"
    SENT = "sent"  # every byte has been sent
    RELEASED = "released"  # decode has committed
    FAILED = "failed"
    ABORTED = "aborted"


State = TypeVar("State", ReceiveState, SendState)
Table = Mapping[tuple[State, SessionInput], State]
RECEIVE_TRANSITIONS: Table[ReceiveState] = {
    (ReceiveState.RESERVED, SessionInput.ALL_OPEN): ReceiveState.RECEIVING,
    (ReceiveState.RECEIVING, SessionInput.ALL_COMPLETE): ReceiveState.COMPLETE,
    (ReceiveState.COMPLETE, SessionInput.FINISH): ReceiveState.COMMITTED,
    # Also from COMPLETE: the source may die before it has sent the first token.
    **{
        (state, SessionInput.NEXT_EPOCH): ReceiveState.RESERVED
        for state in (
            ReceiveState.RESERVED,
            ReceiveState.RECEIVING,
            ReceiveState.COMPLETE,
            ReceiveState.FAILED,
        )
    },
    **{
        (state, SessionInput.FAIL): ReceiveState.FAILED
        for state in (ReceiveState.RESERVED, ReceiveState.RECEIVING, ReceiveState.COMPLETE)
    },
    **{
        (state, SessionInput.ABORT): ReceiveState.ABORTED
        for state in (
            ReceiveState.RESERVED,
            ReceiveState.RECEIVING,
            ReceiveState.COMPLETE,
            ReceiveState.FAILED,
        )
    },
}
SEND_TRANSITIONS: Table[SendState] = {
    (SendState.PLANNED, SessionInput.ALL_OPEN): SendState.SENDING,
    (SendState.SENDING, SessionInput.ALL_COMPLETE): SendState.SENT,
    (SendState.SENT, SessionInput.FINISH): SendState.RELEASED,
    **{
        (state, SessionInput.FAIL): SendState.FAILED
        for state in (SendState.PLANNED, SendState.SENDING, SendState.SENT)
    },
    **{
        (state, SessionInput.ABORT): SendState.ABORTED
        for state in (SendState.PLANNED, SendState.SENDING, SendState.SENT, SendState.FAILED)
    },
}
