"""Reference arithmetic for block-scaled formats: what a correct implementation may output.

Everything here is integer or FP64 arithmetic of its own on plain torch tensors of any device. Nothing calls a
library's cast, quantiser or shuffle, and nothing imports the other packages of this project.
"""
