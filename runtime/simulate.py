"""The what-if machine: replay a trace on a described machine."""
