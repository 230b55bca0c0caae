"""Architecture gating without a GPU: what a library says of each architecture, what is expected, and what compiles.

Nothing here starts CUDA. A library is asked in a child process whose CUDA device is a fake (``fake_device.py``); its
answers (``observed.py``) are compared with published claims (``expected.toml``) and with each other (``rules.py``).
"""
