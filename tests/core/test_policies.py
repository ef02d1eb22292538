import pytest

from commsched.core.errors import ConfigError
from commsched.core.policies import make_policy, policy_names
from commsched.testing.check_policy import check_policy


def test_the_policies_there_are() -> None:
    assert policy_names() == ["fifo", "priority", "rsag"]


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_conforms(name: str) -> None:
    check_policy(lambda: make_policy(name))


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as raised:
        make_policy("lifo")
    assert str(raised.value) == "policy 'lifo' is unknown; there are: fifo, priority, rsag"
