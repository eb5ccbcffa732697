// What scrolls inside the page can be reached by keyboard.
addEventListener("DOMContentLoaded", () => {
  for (const one of document.querySelectorAll("article pre, article table, article .table-wrapper")) one.tabIndex = 0;
});
