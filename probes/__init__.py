"""Measuring and fitting: links, memory, disks, topology, fingerprint. The lowest floor."""
