"""The models that are trained, at full size and reduced: plain torch modules, without dropout."""
