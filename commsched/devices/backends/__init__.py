"""One module for each kind of device. It has ``open_device(number)``."""
