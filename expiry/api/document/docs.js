for (const pre of document.querySelectorAll("pre")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(pre.querySelector("code").textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(pre.querySelector("code"));
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  const frame = document.createElement("div");
  frame.className = "frame";
  pre.replaceWith(frame);
  frame.append(pre, button);
}
for (const link of document.querySelectorAll("nav a")) {
  link.addEventListener("click", () => { document.getElementById("menu").checked = false; });
}
