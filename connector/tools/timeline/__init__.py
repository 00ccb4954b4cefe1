"""The timeline page: what every request went through, as one HTML file that needs nothing else.

`export.py` makes the document that the page shows. The other files are the page itself: `page.html` with `page.css`
and, in this order, `data.js`, `chart.js`, `lanes.js`, `panel.js` and `page.js`.
"""
