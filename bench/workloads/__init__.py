"""The trained models, as layers with parameters and times, real or emulated."""
