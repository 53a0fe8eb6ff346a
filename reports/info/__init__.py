"""Pure functions from stored records to the very numbers that a report shows. No plotting, no markup, no printing."""
