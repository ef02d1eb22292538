"""The rates of links, measured with plain TCP between neighbours in a ring."""

from __future__ import annotations

import socket
import threading

import pytest

from bench.harness import network as link
from bench.harness.network import best_stretch, measure_flows, measure_network, payload_share, traffic
from commsched.control.rendezvous import Reached
from commsched.core.errors import TransportError
from commsched.session.local import local_sessions
from commsched.testing.world import run_world

NONCE = bytes(range(16))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_learns_the_rate_of_every_flow(world_size):
    sessions = local_sessions(world_size)

    def rank(number):
        with sessions[number] as session:
            return measure_flows(session, "127.0.0.1", 500_000)

    flows = run_world(world_size, rank)
    assert len(flows[0]) == world_size
    assert all(each == flows[0] and min(each) > 0 for each in flows)


def test_one_rank_of_each_machine_measures_its_link(monkeypatch):
    sessions = local_sessions(4)
    here = threading.local()
    monkeypatch.setattr(link, "reached_at", lambda host: Reached(host, False, "aabb"[here.rank]))
    monkeypatch.setattr(link, "UNSHAPED_BYTES", 300_000)

    def rank(number):
        here.rank = number
        with sessions[number] as session:
            network = measure_network(session, "127.0.0.1", None, 1, False)
            with traffic(session, "127.0.0.1"):
                session.gather("full links")
            return network

    networks = run_world(4, rank)
    assert len(networks[0].worker_rates) == 2
    assert networks[0].server_rates == [max(networks[0].worker_rates)]
    assert all(network == networks[0] for network in networks)


@pytest.mark.parametrize(("rate", "counted"), [(3.125e6, 32 * 256 * 1024), (125e6, 62_500_000)])
def test_a_slow_link_is_measured_for_longer(rate, counted, monkeypatch):
    """The bytes that it saves up in a pause must be few beside those that are counted."""
    asked, sessions = [], local_sessions(2)
    monkeypatch.setattr(link, "measure_flows", lambda session, host, nbytes: asked.append(nbytes) or [0.9 * rate] * 2)

    def rank(number):
        with sessions[number] as session:
            return measure_network(session, "127.0.0.1", [rate, rate, 2 * rate], 1, False)

    for network in run_world(2, rank):
        assert network.worker_rates + network.server_rates == pytest.approx([0.9 * rate, 0.9 * rate, 1.8 * rate])
    assert asked == [counted] * 2


def test_a_neighbour_that_cannot_be_reached_is_named(monkeypatch):
    sessions = local_sessions(2)

    def refuse(address, timeout):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(link.socket, "create_connection", refuse)

    def rank(number):
        with sessions[number] as session:
            return measure_flows(session, "127.0.0.1", 1000)

    with pytest.raises(TransportError, match=r"rank (0 could not connect to rank 1|1 could not connect to rank 0) to "):
        run_world(2, rank)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(("call", "what"), [("_send", "send to rank 2"), ("_receive", "receive from rank 0")])
def test_the_neighbour_of_a_flow_that_broke_is_named(monkeypatch, measured, call, what):
    """Rank 1 in a ring of three has two: one sends to it, and it sends to the other."""
    sessions = local_sessions(3)
    name = call if measured else {"_send": "_send_until", "_receive": "_discard"}[call]
    works, lock, breaks = getattr(link, name), threading.Lock(), []
    here = threading.local()
    real = link._meet

    def meet(session, *arguments):
        flows = real(session, *arguments)
        here.mine = flows
        if session.rank == 1:
            breaks.append(flows.outgoing if call == "_send" else flows.incoming)
        return flows

    def breaking(connection, *arguments):
        with lock:
            broken = connection in breaks
        if broken:
            raise ConnectionResetError("it broke")
        return works(connection, *arguments)

    monkeypatch.setattr(link, "_meet", meet)
    monkeypatch.setattr(link, name, breaking)

    def rank(number):
        with sessions[number] as session:
            if measured:
                measure_flows(session, "127.0.0.1", 1000)
            else:
                with traffic(session, "127.0.0.1"):
                    session.gather("full links")

    with pytest.raises(TransportError, match=f"rank 1 could not {what} to measure the network: it broke"):
        run_world(3, rank)


def test_an_address_that_is_not_this_machines_is_no_neighbours_fault():
    sessions = local_sessions(2)

    def rank(number):
        with sessions[number] as session:
            return measure_flows(session, "192.0.2.1", 1000)

    with pytest.raises(TransportError, match=r"rank \d could not listen at 192.0.2.1 to measure the network: "):
        run_world(2, rank)


def test_an_error_of_the_work_beside_traffic_is_its_own(monkeypatch):
    """Also on a rank that takes no part in the traffic."""
    sessions, raised = local_sessions(3), []
    here = threading.local()
    monkeypatch.setattr(link, "reached_at", lambda host: Reached(host, False, "aab"[here.rank]))

    def rank(number):
        here.rank = number
        with sessions[number] as session:
            with pytest.raises(FileNotFoundError, match="of the work"), traffic(session, "127.0.0.1"):
                raise FileNotFoundError("of the work")
            raised.append(number)

    run_world(3, rank)
    assert sorted(raised) == [0, 1, 2]


def test_a_stranger_is_turned_away():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as stranger, socket.create_connection(address) as friend:
            stranger.sendall(bytes(16))
            friend.sendall(NONCE)
            with link._accept(listener, NONCE) as accepted:
                assert accepted.getpeername() == friend.getsockname()
            assert stranger.recv(1) == b""


def test_a_connection_that_ends_early_is_said():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(bytes(1000))
        with pytest.raises(ConnectionError, match=f"the connection ended {link.SKIPPED_BYTES - 1000} bytes too early"):
            link._receive(ours, 5000)


@pytest.mark.parametrize("counted", [1, 300_001, 1_000_000])
def test_all_that_is_sent_is_received(counted):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = theirs, link.SKIPPED_BYTES + link.STRETCHES * counted
        sender = threading.Thread(target=link._send, args=arguments, daemon=True)
        sender.start()
        rates = link._receive(ours, counted)
        assert len(rates) == link.STRETCHES
        assert min(rates) > 0
        sender.join(300)
        theirs.shutdown(socket.SHUT_WR)
        assert ours.recv(1) == b""


def test_each_stretch_is_timed_by_itself(monkeypatch):
    moments = iter([10.0, 12.0, 13.0, 17.0])
    monkeypatch.setattr(link, "perf_counter", lambda: next(moments))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        total = link.SKIPPED_BYTES + link.STRETCHES * 1000
        sender = threading.Thread(target=link._send, args=(theirs, total), daemon=True)
        sender.start()
        assert link._receive(ours, 1000) == [500.0, 1000.0, 250.0]
        sender.join(300)


def test_the_best_stretch_is_the_same_for_all_ranks():
    assert best_stretch([[5.0, 9.0, 1.0], [5.0, 8.0, 1.0], [5.0, 4.0, 99.0]]) == [9.0, 8.0, 4.0]


def test_the_share_of_payload_is_seen_in_the_slower_of_two_links():
    nominal = [100.0, 100.0, 50.0]  # flows come from the rank before: 2 to 0, 0 to 1, 1 to 2
    assert payload_share([48.0, 96.0, 48.0], nominal) == pytest.approx(0.96)
    assert payload_share([48.0, 20.0, 48.0], nominal) == pytest.approx(0.96)  # one that was disturbed
