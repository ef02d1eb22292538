"""A rank in a process of its own, for tests that kill or stop it. Prints one JSON line for whatever happens.

    python -m tests.control.member_process ADDRESS RANK WORLD_SIZE FAIL_AFTER_SECONDS [HOW]

ADDRESS "serve": host the server too, at any port. HOW "wait" (default): until told of a failure; "exit": end the script,
after a gather, without closing anything; "raise": the same by an exception; "tell": tell rank 0 the numbers below 300, and
leave when as many were announced; "announce": what only rank 0 may, and then wait.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from commsched.control.client import ControlClient
from commsched.control.messages import Member
from commsched.control.server import ControlServer
from commsched.core.errors import CommschedError

from .world import TOKEN, Recorder

over = threading.Event()


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class Teller(Recorder):
    def on_failure(self, error: CommschedError) -> None:
        say(failure=type(error).__name__, message=str(error))
        over.set()

    def leave_after(self, client: ControlClient, count: int) -> None:
        for number in range(count):
            client.send_to_rank_0("t", number)
        announced = [self.next("announced") for _ in range(count)]
        client.leave()
        client.wait_until_all_left()
        say(announced=announced)
        over.set()


def main() -> None:
    address, rank, world_size, fail_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    how = sys.argv[5] if len(sys.argv) > 5 else "wait"
    timing = {"fail_after_seconds": fail_after, "join_within_seconds": 60.0}
    server = None
    if address == "serve":
        server = ControlServer("127.0.0.1:0", TOKEN, world_size, **timing)
        address = server.address
        say(address=address)
    listener = Teller()
    client = ControlClient(address, TOKEN, Member.rank(rank, world_size), **timing, server=server)
    client.listen(listener)
    say(joined=rank)
    if how != "wait":
        client.gather("all have joined", None)
    if how == "exit":
        return
    if how == "raise":
        raise ValueError("boom")
    if how == "announce":
        client.announce("t", "me too")
    if how == "tell":
        listener.leave_after(client, 300)
    over.wait()
    client.close()
    if server is not None:
        server.close()
    say(threads=[thread.name for thread in threading.enumerate() if thread.name.startswith("commsched")])


if __name__ == "__main__":
    main()
