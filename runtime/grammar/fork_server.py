"""Process that loads a tokenizer once and forks the grammar processes.

A worker or router starts at most one, with its first grammar.

    python -m runtime.grammar.fork_server CONTROL_FD TOKENIZER_JSON END_TOKEN_ID...

Over the control socket it reports when the tokenizer is loaded. Then it receives one end of a
socket pair per grammar and returns a file descriptor of the new process (pidfd), by which the owner
can end it. It has a single thread, so forking is safe, and shares no memory with its owner, so a
fork is quick. It ends with its children when the owner ends in any way.
"""

import ctypes
import os
import resource
import signal
import socket
import sys

from llguidance import LLTokenizer

from runtime.grammar.child import serve

READY = b"ready"
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    control_fd, path, *ends = arguments
    end_token_ids = [int(token) for token in ends]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap ended children automatically
    with socket.socket(fileno=int(control_fd)) as control:
        tokenizer = LLTokenizer(path, eos_token=end_token_ids)
        control.send(READY)
        while fds := socket.recv_fds(control, 16, 1)[1]:
            with socket.socket(fileno=fds[0]) as owner:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _run_child(owner, tokenizer, frozenset(end_token_ids))
            pidfd = os.pidfd_open(pid)
            socket.send_fds(control, [b"started"], [pidfd])
            os.close(pidfd)


def _run_child(owner: socket.socket, tokenizer: LLTokenizer, end_token_ids: frozenset[int]) -> None:
    """Serve one grammar and exit; never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(owner, tokenizer, end_token_ids)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
