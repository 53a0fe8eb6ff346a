"""From a page's content to one self-contained HTML file."""
