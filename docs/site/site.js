// Wide tables and code scroll by the keyboard too. The theme wraps tables after the page has loaded.
new MutationObserver(() => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex]), pre > code:not([tabindex])")) wide.tabIndex = 0
}).observe(document.documentElement, { childList: true, subtree: true })
