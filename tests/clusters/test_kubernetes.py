"""The files of ``examples/kubernetes`` fit the schemas of their kinds, and the check finds what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("kubernetes_validate")
pytest.importorskip("kubeflow_trainer_api")

from tests.clusters import kubernetes  # noqa: E402

DOCUMENTS = {
    f"{document['kind']} {document['metadata']['name']}": document
    for path in sorted(kubernetes.EXAMPLES.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_schema_takes_it(name: str) -> None:
    assert kubernetes.problem(DOCUMENTS[name]) is None


def test_every_kind_is_there() -> None:
    assert {name.split()[0] for name in DOCUMENTS} == {"ClusterTrainingRuntime", "Job", "NetworkPolicy", "Service", "TrainJob"}


@pytest.mark.parametrize(
    ("name", "where", "wrong"),
    [
        ("Job commsched-worker", lambda job: job["spec"]["template"]["spec"], "subdomian"),
        ("TrainJob commsched-digits", lambda job: job["spec"]["trainer"], "numberNodes"),
        ("ClusterTrainingRuntime commsched-torch", lambda runtime: runtime["spec"], "mlPolice"),
    ],
)
def test_a_key_that_the_schema_does_not_know_is_named(
    name: str, where: Callable[[Any], dict[str, object]], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = where(DOCUMENTS[name])
    monkeypatch.setitem(place, wrong, "1")
    assert wrong in str(kubernetes.problem(DOCUMENTS[name]))


def test_a_value_of_another_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    job = DOCUMENTS["Job commsched-server"]
    monkeypatch.setitem(job["spec"], "parallelism", "two")
    assert "'two' is not of type" in str(kubernetes.problem(job))
