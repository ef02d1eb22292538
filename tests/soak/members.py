"""Members of a control channel, as threads of one process. members.py ADDRESS TOKEN FIRST COUNT SIZE"""

from __future__ import annotations

import os
import sys
import threading

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from commsched.control.client import ControlClient
from commsched.control.messages import Member

#: The messages that each rank sends to rank 0 in a row, and that rank 0 announces.
MESSAGES = 20
TIMES = {"fail_after_seconds": 10.0, "join_within_seconds": 240.0}


def take_part(client: ControlClient) -> None:
    """What each rank does, rank 0 too. It gathers between what rank 0 measures."""
    client.gather_next("begin")
    client.gather_next("rank 0 was idle")
    client.gather_next("equal " * 20)
    client.gather_next(f"a value of rank {client.rank}, which no other has" + "." * 60)
    for _ in range(MESSAGES if client.rank else 0):
        client.send_to_rank_0("scale", "x" * 100)
    client.gather_next("sent")
    client.gather_next("announced")
    client.leave()
    client.wait_until_all_left()
    client.close()


def main() -> None:
    address, token, first, count, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

    def live(rank: int) -> None:
        take_part(ControlClient(address, token, Member.rank(rank, size), **TIMES))

    ranks = [threading.Thread(target=live, args=(rank,)) for rank in range(first, first + count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()
