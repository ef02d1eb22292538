"""The trained models, at full size and reduced: plain torch modules without dropout."""
