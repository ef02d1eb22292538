from commsched import Session
from commsched.plugins.mxnet import ScheduledTrainer

from .training import batches, mlp, on_ranks, share, step


def test_a_released_group_leaves_no_thread_behind() -> None:
    def run(session: Session) -> list[bool]:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), "sgd", session=session)
        (inputs, labels), *_ = batches(2)
        step(net, trainer, inputs[share(session)], labels[share(session)])
        assert trainer._exchange is not None
        assert trainer._exchange._rounds is not None
        thread = trainer._exchange._rounds.queued._watch._thread
        before = thread.is_alive()
        trainer.detach()
        return [before, thread.is_alive()]

    assert on_ranks(run) == [[True, False]] * 2
