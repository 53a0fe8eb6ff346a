"""Experts as bytes: the index of a checkpoint, slots on the device, and the transfers that fill them."""
