// Runs the search worker in a hidden frame, because browsers refuse workers for pages that are opened as files.
// The theme looks for the class by its name. `docs/repository_pages.py` inserts this file in place of a remote script.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    this.frame = frame
    const inner = frame.contentWindow
    const load = address => new Promise((resolve, reject) => {
      const script = inner.document.createElement("script")
      script.src = address
      script.onload = resolve
      script.onerror = () => reject(new Error(`cannot load ${address}`))
      inner.document.body.append(script)
    })
    inner.IFrameWorker = IFrameWorker
    inner.importScripts = (...addresses) => addresses.reduce((ready, address) => ready.then(() => load(address)), Promise.resolve())
    inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
    this.ready = load(new URL(url, document.baseURI).href)
  }

  postMessage(data) {
    const inner = this.frame.contentWindow
    this.ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
  }

  terminate() {
    this.frame.remove()
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker
  window.Worker = IFrameWorker
}
