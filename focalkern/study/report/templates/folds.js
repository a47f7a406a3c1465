// Sections that are folded open when a link leads to them, and on paper.
(() => {
  "use strict";
  const folds = () => [...document.querySelectorAll("details.fold")];
  const open = () => folds().forEach((one) => (one.open ||= `#${one.parentElement.id}` === location.hash));
  window.addEventListener("DOMContentLoaded", open);
  window.addEventListener("hashchange", open);
  window.addEventListener("beforeprint", () => folds().forEach((one) => (one.open = true)));
})();
