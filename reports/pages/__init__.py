"""Pages: a verdict and sections of cards, put together from info. How a page is written is another folder's matter."""
