"""The commands, one file each: parse, call one core function, print."""
