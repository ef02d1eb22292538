"""``python -m tests.clusters.kubernetes``: the files of ``examples/kubernetes`` against the schemas of their kinds.

No cluster is needed, and none has run them. ``test_kubernetes.py`` runs the same as a test.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kubeflow_trainer_api.models as trainer
import kubernetes_validate
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"


def main() -> int:
    failed = 0
    for path in sorted(EXAMPLES.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            wrong = problem(document)
            print(f"{path.name}: {document['kind']} {document['metadata']['name']}: {wrong or 'right'}")
            failed += wrong is not None
    return 1 if failed else 0


def problem(document: dict[str, object]) -> str | None:
    """The fault of it; None if it has none."""
    kind = str(document["kind"])
    try:
        if str(document["apiVersion"]).startswith("trainer.kubeflow.org/"):
            model = getattr(trainer, f"TrainerV1alpha1{kind}")
            read = model.from_dict(document).to_dict()
            lost = sorted(names(document) - names(read))
            return f"the schema does not know {', '.join(lost)}" if lost else None
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except Exception as error:  # whatever the two libraries raise
        return f"{type(error).__name__}: {error}"
    return None


def names(value: object, path: str = "") -> set[str]:
    """The paths of all keys. A library that reads what it knows leaves out the others."""
    if isinstance(value, dict):
        return set().union(*(names(inner, f"{path}.{key}") | {f"{path}.{key}"} for key, inner in value.items()))
    if isinstance(value, list):
        return set().union(*(names(inner, f"{path}[{number}]") for number, inner in enumerate(value)))
    return set()


if __name__ == "__main__":
    sys.exit(main())
