// Shows /openapi.json with Swagger UI. A key stays in the memory of this page.

const form = document.getElementById("key-form");
const field = document.getElementById("key");
const problem = document.getElementById("problem");

async function load(key) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch("openapi.json", { headers });
  if (response.status === 401) {
    form.hidden = false;
    problem.textContent = key ? "The server does not accept this key." : "";
    field.focus();
    return;
  }
  if (!response.ok) {
    form.hidden = false;
    problem.textContent = `The server answered with ${response.status}.`;
    return;
  }
  form.hidden = true;
  show(await response.json(), key);
}

function show(spec, key) {
  // A proxy may serve this page below a prefix.
  const base = new URL(".", window.location.href).pathname.replace(/\/$/, "");
  const ui = window.SwaggerUIBundle({
    spec: { ...spec, servers: [{ url: base || "/" }] },
    dom_id: "#api",
    deepLinking: true,
    docExpansion: "list",
    validatorUrl: null,
    onComplete: () => {
      if (key) {
        ui.preauthorizeApiKey("key", key);
      }
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  load(field.value.trim());
});

load("");
