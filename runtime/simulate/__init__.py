"""The what-if machine: replay a routing trace on a described machine, under any policies, caches and placements."""
