"""The Ray Train plugin where Ray is not installed. With Ray: ``test_ray_cluster.py``."""

from __future__ import annotations

from pathlib import Path

from .missing import import_without


def test_without_ray(tmp_path: Path) -> None:
    assert 'this plugin needs Ray Train: pip install "commsched[ray]"' in import_without("ray", tmp_path)
