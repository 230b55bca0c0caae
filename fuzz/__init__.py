"""What to try: cases, the values that fill their tensors, and the strategies that draw plans of them."""
