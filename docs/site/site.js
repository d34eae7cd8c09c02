// A wide table scrolls by the keyboard too. The theme wraps tables after the page has loaded.
new MutationObserver(() => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.tabIndex = 0
}).observe(document.documentElement, { childList: true, subtree: true })
