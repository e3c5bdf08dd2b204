// Light and dark: the system's setting, unless the reader chose one. Works without storage, and the page works without this script.
const root = document.documentElement, key = "privfl-theme", system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
try { chosen = localStorage.getItem(key); } catch (error) { /* private window */ }

function show(theme) {
  root.dataset.theme = theme;
  const button = document.getElementById("theme");
  if (button) { button.textContent = theme === "dark" ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${button.textContent.toLowerCase()} colours`); }
}

show(chosen || (system.matches ? "dark" : "light"));
system.addEventListener("change", event => { if (!chosen) show(event.matches ? "dark" : "light"); });
addEventListener("DOMContentLoaded", () => {
  show(root.dataset.theme);
  document.getElementById("theme").onclick = () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    show(chosen);
    try { localStorage.setItem(key, chosen); } catch (error) { /* private window */ }
  };
  const code = document.getElementById("code");
  if (code) code.onclick = () => { code.textContent = document.body.classList.toggle("no-code") ? "Show code" : "Hide code"; };
});
