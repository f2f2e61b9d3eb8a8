import os
import socket

from runtime.process.sockets import open_sockets


def test_only_sockets_are_listed_with_their_inodes() -> None:
    with socket.socket() as mine, open(os.devnull) as file:
        listed = open_sockets()
        assert listed[mine.fileno()] == os.fstat(mine.fileno()).st_ino
        assert file.fileno() not in listed


def test_a_list_is_shared_for_as_long_as_its_reader_allows() -> None:
    """Without an age it is made anew; what closed meanwhile is gone from it."""
    before = open_sockets()
    with socket.socket() as mine:
        assert open_sockets(max_age_s=60.0) is before
        inode = os.fstat(mine.fileno()).st_ino
        assert open_sockets()[mine.fileno()] == inode
    assert inode not in open_sockets().values()
