"""From stored records to pages and tables: pure info, then rendering. The fourth floor."""
