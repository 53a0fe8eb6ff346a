"""From info to cards: a title, plotly figures, a text alternative and the table of the data behind them."""
