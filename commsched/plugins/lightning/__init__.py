"""Lightning plugin.

    import commsched.plugins.lightning
    trainer = lightning.pytorch.Trainer(strategy="commsched", devices=4, ...)

Everything else of the training script stays as it is. Settings are those of ``commsched.init``: in the environment, or given to
the strategy itself, ``Trainer(strategy=ScheduledStrategy(transport="gloo"), ...)``.

Where ``pytorch_lightning`` is the package that the script has imported before, the strategy is registered with that one.
"""

try:
    from .package import StrategyRegistry
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs Lightning: pip install "commsched[lightning]"', name="lightning") from error

from .strategy import ScheduledStrategy

StrategyRegistry.register("commsched", ScheduledStrategy, "DDP without its wrapper: commsched averages the gradients")

__all__ = ["ScheduledStrategy"]
