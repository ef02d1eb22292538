"""Lightning plugin.

    import commsched.plugins.lightning
    trainer = lightning.pytorch.Trainer(strategy="commsched", devices=4, ...)

Everything else of the training script stays as it is. The settings are the same as for ``commsched.init``. Set them in the
environment, or pass them to the strategy: ``Trainer(strategy=ScheduledStrategy(transport="gloo"), ...)``.

If the script has imported ``pytorch_lightning`` before, the strategy is registered with that package.
"""

try:
    from .package import StrategyRegistry
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs Lightning: pip install "commsched[lightning]"', name="lightning") from error

from .strategy import ScheduledStrategy

StrategyRegistry.register("commsched", ScheduledStrategy, "DDP without its wrapper: commsched averages the gradients")

__all__ = ["ScheduledStrategy"]
