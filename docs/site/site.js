// Wide tables, pictures and code scroll by the keyboard too, long names in tables break after dots and underscores, and
// the buttons beside each block of code have a name of their own. The theme wraps tables and adds buttons late. A section
// of the navigation whose title is a link has an empty label: its name is made of its title and that of the section around.
let blocks = 0
const WIDE = ".md-typeset__scrollwrap, .un-figure, pre > code"
const titled = nav => nav?.querySelector(":scope > .md-nav__title")?.textContent.trim()
new MutationObserver(() => {
  for (const wide of document.querySelectorAll(WIDE)) if (!wide.hasAttribute("tabindex")) wide.tabIndex = 0
  for (const name of document.querySelectorAll("td code:not(:has(*))")) {
    const parts = name.textContent.length > 20 ? name.textContent.split(/(?<=[._(,/=:])(?=\w)/) : []
    if (parts.length > 1) name.replaceChildren(...parts.flatMap(part => [document.createElement("wbr"), part]).slice(1))
  }
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach(nav => {
    nav.ariaLabel = `Code block ${++blocks}`
  })
  for (const nav of document.querySelectorAll("nav.md-nav[aria-labelledby]")) {
    const names = [nav.parentElement.closest("nav.md-nav"), nav].map(titled)
    if (!names[1] || document.getElementById(nav.getAttribute("aria-labelledby"))?.textContent.trim()) continue
    nav.ariaLabel = names.join(": ")
    nav.removeAttribute("aria-labelledby")
  }
}).observe(document.documentElement, { childList: true, subtree: true })
