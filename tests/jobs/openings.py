"""Places in the opening of a generation, for tests that let a process be lost just there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commsched.control.elastic_messages import Place
from commsched.session import opening
from commsched.session.elastic import Elastic
from commsched.session.membership import ElasticMember
from commsched.session.session import Session

#: In their order: the rank knows its place; has joined the control channel; connects to others, over ps or gloo; has opened its
#: session; has the root's values.
PLACES = ("placed", "joined", "connecting", "opened", "moved")

#: Called with a place, the rank of this process, and the number of the generation.
Hit = Callable[[str, int, int], None]


def watch(hit: Hit) -> None:
    """Let this process call ``hit`` at each place, from now on."""
    now = [0, 0]  # the rank and the generation

    def before(owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name)

        def called(*args: Any, **more: Any) -> Any:
            hit(place, *now)
            return original(*args, **more)

        setattr(owner, name, called)

    opens = ElasticMember._open

    def opened(member: ElasticMember, place: Place) -> Session:
        now[:] = place.rank, place.generation
        hit("placed", *now)
        session = opens(member, place)
        hit("opened", *now)
        return session

    ElasticMember._open = opened  # type: ignore[method-assign]
    before(opening, "_require_same_settings", "joined")
    before(Elastic, "_await_all", "moved")
    open_named = opening.open_named

    def opened_by_name(context: Any, name: str) -> Any:
        if not is_watched:
            is_watched.append(name)
            if name == "ps":
                from commsched.transports.backends.ps.lane import RemoteLane

                before(RemoteLane, "wait_connected", "connecting")
            else:
                _watch_gloo(lambda: hit("connecting", *now))
        return open_named(context, name)

    is_watched: list[str] = []
    opening.open_named = opened_by_name


def _watch_gloo(connecting: Callable[[], None]) -> None:
    """Call ``connecting`` when all ranks have told each other their addresses, before they connect."""
    from commsched.transports.backends.gloo.meeting import GatherStore

    wait = GatherStore.wait

    def waited(*args: Any, **more: Any) -> None:
        wait(*args, **more)
        connecting()

    GatherStore.wait = waited  # type: ignore[method-assign]
